-- Tokens estimated on the safe side in every script: positive weights (hundredths of a token) of what a text is made of,
-- fitted to real messages with o200k_base. cl100k_base takes the same for English and code, but 1.2 to 4 times as many in
-- other scripts: for it the estimate is too low there. tests/bench/estimate_table.py measures.

create or replace function pycontext._bytes_as_bits(text)
returns bit varying
language sql immutable strict parallel safe
return ('x' || pg_catalog.encode(pg_catalog.convert_to($1, 'UTF8'), 'hex'))::bit varying;

comment on function pycontext._bytes_as_bits(text) is
    'The bytes of a text as a bit string: one operator then looks at every byte at once.';

revoke execute on function pycontext._bytes_as_bits(text) from public;

-- Letters of Cyrillic, Latin with marks, Arabic, Hebrew, Armenian, Greek: the characters of two bytes. Takes them out of
-- `chars` and returns the hundredths of tokens they take; `context` is the text they stand in.
create or replace function pycontext._estimate_alphabets(context text, inout chars text, out hundredths bigint)
language plpgsql immutable strict parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_class constant text[] := array[
        '[\u0430-\u044f\u0451]+', '[\u0401\u0410-\u042f]+', '[\u0400-\u052f]+', '[\u00e0-\u00ff]+',
        '[\u00c0-\u024f]+', '[\u0600-\u06ff]+', '[\u0531-\u0587\u05d0-\u05ea]+', '[\u0386-\u03ce]+'];
    v_weight constant integer[] := array[32, 160, 148, 110, 182, 55, 50, 47];
    v_before integer := length(chars);
    v_after integer;
begin
    hundredths := 0;
    for i in 1..cardinality(v_class) loop
        exit when v_before = 0;
        chars := regexp_replace(chars collate "C", v_class[i], '', 'g');
        v_after := length(chars);
        hundredths := hundredths + v_weight[i]::bigint * (v_before - v_after);
        if i = 1 and v_before > v_after then
            -- Not words: four hard consonants in a row, runs of twenty letters. Bulgarian: the hard sign.
            hundredths := hundredths
                + 450 * regexp_count(context collate "C",
                    '[\u0431-\u0434\u0436\u0437\u043a-\u043d\u043f-\u0442\u0444-\u0449\u044a\u044c]{4}')
                + 1400 * regexp_count(context collate "C", '[\u0430-\u044f\u0451]{20}')
                + 80 * (length(context) - length(replace(context, E'\u044a', '')));
        end if;
        v_before := v_after;
    end loop;
end
$$;

comment on function pycontext._estimate_alphabets(text, text) is
    'Hundredths of tokens that the two-byte letters take, and the characters that are left.';

revoke execute on function pycontext._estimate_alphabets(text, text) from public;

-- Han, Kana, Hangul, Indic and South-East Asian scripts, emoji, signs: the characters of three and four bytes. The long classes
-- are what o200k_base knows as one token: Han and Hangul of everyday use, emoji; then what it needs two for.
create or replace function pycontext._estimate_wide(chars text)
returns bigint
language plpgsql immutable strict parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_class constant text[] := array[
        '[一丁七万-下不与专且世丘业东丝两-並丨个中丰串临丶丸-主丽举乃久么义之乌乎乐乔乗-乙九也-乡书买乱乳乾亂了予争事二于亏云互五井亚些亞亡交亦产亩享-亮亲人亿-仁仅今介仍'
        '从仓-他付仙代-以仪们仲件价任份企伊伍伏休众-会伝伟传伤伦伯估伴伸似但位-佐体何余佛作你佣佩佳使來例供依侠価侣侧侯侵便係-俄俊俗保信修俱俺個倍們倒候借倡値倫债值倾假偏做'
        '停健側偶偷偿傅備储催傳傷働像僕價億優儿允元-兆先光克免児-兒兔党入內-兩八-六兰共关-典养-兽内円冈冊册再冒写军农冠冬冰冲决况冷冻净准凉凌减凝几凡凤処凭凯凰凸出击函刀分'
        '切刊刑划列-创初删判別利别到制-券刺刻剂則削前剑剤剧剩剪副割創劇力办-务动-努励-劳効势勇勒動務勝募勢勤勿包化北匙匹-医區十千升午半华协卒-単博占-卢卧卫印危即却卷卸厂'
        '厅历厉压厕厘厚原厦厨去县参參又-収发叔取-变口-另只-召可台史右叶-司吃各合-吊同-后吐向吕吗君吞吟否-吨含听启吴吸吹吻吾呀呈告员呢周味呵呻-命咋和咖咨咪品哈响員哥哦哪'
        '哭哲唐售唯唱商啊問啥啦啪善喊喘喜喝單営喷嗎嗯嘉嘎嘛嘴嘿噜器四回因团団园困囲-围固国图圆圈國園圖團土圣在地圳场圾址坂均坊坏-坑块坚坛坝坡坦坪垃型埃城埔域培基堂堡報場堵塑塔'
        '塘塞填境墓増墙增墨壁壇士壮声売处备変复夏夕外多夜够夢大天-夫央失头夹夺奇-奉奋奏契奔奖套奥女奴奶-她好如妇妈妓妖妙妞妮妹妻姆始姐姑姓委姚姜姨姿威娃娇娘娛娜娱婆婚婦婷媒媳'
        '媽嫁嫂嫌嫩嬉子孔孕字-孙孟季孤学孩學宁它宅宇-安宋完宏宗官定宜-室宫宮害宴家容宽-宿寄密富寒寓寝察實寨寫寶寸-导対寿封専射将-專尊尋對-小少尔尖尚尝尤就尸尺尼-层居届屋'
        '屏展属履屯山岁岗岛岡岩岭岳岸峡峰島崎川州巡工-巨差己已巴巻币-布帅师希帐帖帝带師席-帰帳帶常帽幅幕干-年并幸幻-幽广広庄庆床序库-底店府废度座庫庭康廉廣延廷建开异-弄弊'
        '式引弗弘弟张弱張強弹强归当录形彦彩彰影役彻彼往征径待很律後徐徒得從御復循微徳徴德徽心必忆忍志-忙応忠忧快念忽怀态怎怒怕怖思怡急性怪总恋恐恒恢恩息恶悉悟悠患悦您悪悲情惊惑'
        '惜惠惨惯想意愛感愿慈態慎慢慧慰懂應戀戏-戒或战戦截戰戲戴戶-戸戻房所手才扎扑-打払托扣执扩扫扬扰扱扶批找-技把抓投抗折抜択抢护报披抱抵押抽担拆拉拍拒-拔拖拘招拜拟拥拨择'
        '括拳拼拾拿持挂指按挑挡挣挥振挺捕损换据捷掃授掉掌排掛採探接控推措掲揉描提插換握揭援搏搜搞搬搭携摄摆摇摘摩摸撃撑撒撞撤播撮撸擊操據擦攝支收改攻放政故效敌敏救敗教敢散敦敬数'
        '整敵數文斗料斤断斯新方於施旁旅旋族旗无既日-早旬旭时旺昂昆昌明易昔星映春昨昭是昼显時晋晒晓晚晨普-晰晴晶智暂暇暑暖暗暨暮暴曜曝曰曲更書曹曼曾-最會月有朋服朗望朝期木未-'
        '札术朱机杀杂权杆杉李-村杜束条来杨杭杯-東松板极构析林枚果枝枪架柄柏某染柔柜查柱柳柴査标栋栏树栗校株样-根格桂桃框案桌桑档桥桶梁梅條梦梨梯械检棋棒棚森植椒検楚業極楼楽概'
        '榜構様槽樂樓標模樣横橋機橹橾權欠-欣欧欲欺款歉歌歓歡-武歩歲-歴歷死殊残殖段殺毁毅母-每毒比毕毛毫氏民气気氣氧水永汁求汇汉汗江-污汤決汽沁沃沈沉沒沖沙沟没沢沪河油治沿況'
        '泄泉泊法泛泡波泥注泰泳泽洁洋洗洛洞津洪洲活派流浅浆测济浓浜浦浩浪浮浴海消涉涓涙涛润涨涩涯液涵淘淡淫深混添清済渐減渠渡温測港游湖湘湾-満源準溪滋滑滚满滤滨滴滿漂漏演漢漫潔'
        '潘潜潭潮澡澳激灣火灭灯灰灵灾炉炎炒炮炸-為炼烈烟烦烧热無焦然焼煌煙煤照熊熟熱燃燕營爆爰爱爵-爸爽片版牌牙牛牡牢牧物牲特犬犯状狂狐狗狠独狸狼猎猛猜猪猫献猴獸玄率玉王玖玛玩'
        '环现玲玻珍珠班現球理琪琳琴瑞璃環瓜瓣瓦瓶甘甚甜生產産用田-申电男甸町画畅界留略番畫異當疆疑疗疫疯疲疼疾病症痛療癌発-百的皆皇皮盆盈益盐-盒盖-盘盛盟監盤目直相盾省眉看県'
        '真眠眼着睛睡督瞬知矩短石矿码砂研砖破础硕硬确碍碎碑碰確碼磁磨示礼社祖祝神祥票祭禁福禧离禽禾秀私秋种科秒秘租秦积称移程稍税種稱稳稿穆積穴究空穿突窍窗窝窥立站竞-章童端競竹'
        '笑笔符第筆等筋筑答策筛筹签简算管箭箱節篇築篮簡籍米类粉粒粗粤粮精糕糖系紀約紅納純紙級素索紧紫累細紹終組経結絡給統絲絶經続維網総緒線締編縄縮總績繁續纠红约级纪纬纯纲纳纵纷'
        '-纹纽线练组细-终绍经绑结绕绘给络绝统继绩绪续维综绿缓编缘缩缴缺网罗罚罩罪置署羅羊美羞群義羽翁翌習翔翠翻翼耀老考者而耐耗耳聊职联聘聚聞聪聯聲職肃肉肌肖股肤肥肩肯育肺胃胆'
        '背胎胖胜胞胡胶胸能脂脑脚脱脸腐腕腰腳腹腾腿膜膽臀臣自臭至致臺與興舍舒舔舗舞舟航般舰船艇良色艳艷艺艾节芝芬芯花芳芸芽苍苏苑苗若苦英范茶茸草荐荒荡荣药荷莉莎莓莞莫莱莲获菌菜'
        '華菲萄萌萝营萨萬落葉著葛葡董蒂蒙蒲蓝蔡蕉蕩薄薦薪薬藏藝藤虎虐虑處虚號虫虹虽蛇蛋蛛蜂蜜蝶融血行術街衛衡衣补表袋袖袜被袭裁裂装裏裕裙補裝裤裸製襪西要覆見規視覚覧親観覽觀-观'
        '规视览觉角解触言訂計訊討記訪設許訳診証評詞詢試話詳誉誌認誘語說説読誰課調談請論講謝證識警議護讀變讓计订认讨让训-记讲许论设-证评识诈-诊词译试诗诚话询该详语误诱说请诸诺'
        '读课谁调谈谋谓谜谢谨谱谷豆豊象豪豹貌負財貨販責買貸費貼賀資賞質購贝负贡-质贫购贯贴贵贷-费赁资赋赌赏赔赖赚赛赞赠赢赤赫走赴-起超越趋趣足跃跌跑距跟跨路跳践踏踩踪躁身車軍'
        '転軽較載輪輯輸轉车轨轩转轮软轴轻载较辅辆辉辑输辖辛辞辣辦辨辰-農边辺込-达迁迅过迈迎运近返还这进-迟迪迫述迷迹追退-逃逆选逊透逐递途這通速造連週進逸逻逼遂遇遊運遍過道-'
        '違遗遠遣遥適遭遮遵選避邀還邑那邦邪邮邻郎郑部郭郵都配酒酷酸醉醒醫采释里-量金鉄鉴銀錄錯録鍵鏈鐘鑫针钟钢钥钮钱钻铁铃铜铭银铺链销锁锅锋锐错锡锦键镇镜長长門閉開間関閱閲關门'
        '闪闭问闲间闻阁阅队阪防-阶阻阿附-陆陈陌降限院除险陪陰陵-陷険陽隆隊階-隐隔際障难雀雄-集雑雕雙雞離難雨雪零雷電需震霍霞露霸青靖静非靠面革鞋韓韩音響頁-頃項順須預領頭頻'
        '頼題額顔願類页顶项-须顾顿预领频颖-题颜额風风飛飞食飯飲養餐館饭饮饰馆馈首香馨馬駅験驗马驰驱驶驻驾验骑骗骚骤骨骰體高鬼魂魅魏魔魚鱼鲁鲜鲸鳥鸟鸡鸣鸭鸿鹅鹏鹰鹿麗麟麦麻麼黃'
        '黄黎黑黒默點鼎鼓鼠鼻齐齢龄龍龙]+',
        '[\u4e00-\u9fff]+', '[\u3041-\u30ff]+',
        '[\u3000-\u3002\u3005\u3007-\u3012\u3014-\u3016\u301c\uff01\uff05\uff06\uff08-\uff27\uff2b\uff2d-'
        '\uff30\uff32-\uff34\uff3b-\uff40\uff45\uff4d\uff57\uff5c\uff5e]+',
        '[가각간갈감-값강같개객거건걸검겁것게겠겨격견결겼경계고곡곤골곳공과관광괴교구국군굴궁권귀규균그극근글금급기긴길김까깔깨꺼께껴꽃꾸꿈끄끌끔끝끼낌나난날남납났내낸낼냈냐냥'
        '너널넘네넷녀녁년념녕노논놀농높놓누눈뉴느는늘능니닉닌님닝다닥단닫달담답닷당대댓더덕던덤데델도독돈돌동돼됐되된될됨됩두둘뒤드득든들듯등디딩따때떠떤또뜨뜻라락란람랍랑래랙랜'
        '램랩랫략량러럭런럴럼럽렇-렉렌렛려력련렬렴렵렸령례로록론롤롭롯뢰료루룸룹류률르른를름리릭린릴림립릿링마막만많말맛망맞매맥맨머먹먼멀메멘며면명몇모목몬몰몸못무문물뮤므미민'
        '밀밍및바-밖반받발밤방배백버번벌범법베벤벨벽변별병보복본볼봉봐봤부북분불붙뷰브블비빈빌빙빛빠뿐쁘쁜사삭산살삼상새색생샵서석선설섭성세센셀셔션셜셨소속손솔송쇄쇼수숙순술숨'
        '쉬쉽슈스슨슬슴습슷승시식신실심십싱싶싸써쓰쓴씀씨씩씬아악안않알암압았앙앞애액앤앨야약양어억언얼엄-었에엔엘여역연열염였영예오옥온올옵와완왔왕왜외요욕용우욱운울움웃워원월'
        '웠웨웹위윈유육윤율융으은을음응의이익인일읽임입있자작잔잘잠잡장재쟁저적전절점접정제젝젠져졌조족존좀종좋좌죄죠주죽준줄중줘즈즌즐즘증지직진질짐집짓징짜짝째쪽찌찍차착찬찮찰'
        '참창찾채책처척천철첨첫청체쳐쳤초촉촌총최추축춘출춤충춰취츠측층치칙친칠침칭카칼캐커컨컬컴컵케켓켜코콘콜콩쿠큐크큰클큼키킨킬킹타탁탄탈탕태택터턴털테텍텐텔템토톡톤통퇴투튀'
        '튜트특튼틀티틱틴팀팅파판팔패팩팬퍼페펴편평폐포폭폰폴폼표푸풀품풍퓨프픈플피픽핀필핏핑하학한할함합항해했행향허헌험헤혀혁현혈협형혜호혹혼홀홈홍화확환활황회획효후훈휘휴흡흥'
        '희히힌힘]+',
        '[\uac00-\ud7a3]+', '[\u2010-\u203a]+', '[\u2500-\u259f]+',
        '[\u2190-\u2193\u21d2\u2605\u2606\u260e\u2634\u263a\u2640\u2642\u2661\u2665\u2666\u266a\u266b'
        '\u2705\u2713\u2714\u2728\u2764\u27a1\u2b50\u2b55\U0001f3fb\U0001f3fc\U0001f447\U0001f449'
        '\U0001f44c\U0001f44d\U0001f44f\U0001f495\U0001f525\U0001f600-\U0001f602\U0001f609\U0001f60a'
        '\U0001f60d\U0001f618\U0001f62d\U0001f642\U0001f64f\U0001f923]+',
        '[\u2194-\u21d1\u21d3-\u21ff\u2300-\u233f\u237c\u2600-\u2604\u2607-\u260d\u260f-\u2633\u2635-'
        '\u2639\u263b-\u263f\u2641\u2643-\u2660\u2662-\u2664\u2667-\u2669\u266c-\u26bf\u26c4\u26c8\u26f0'
        '\u2700-\u2704\u2706-\u2712\u2715-\u2727\u2729-\u2763\u2765-\u27a0\u27a2-\u27bf\u2b00-\u2b3f'
        '\u2b54\U0001f0ac\U0001f0b9\U0001f0fd\U0001f18d\U0001f192\U0001f1c0-\U0001f1ff\U0001f218'
        '\U0001f22c\U0001f274\U0001f300-\U0001f3fa\U0001f3fd-\U0001f446\U0001f448\U0001f44a\U0001f44b'
        '\U0001f44e\U0001f450-\U0001f494\U0001f496-\U0001f524\U0001f526-\U0001f53f\U0001f545\U0001f54c'
        '\U0001f603-\U0001f608\U0001f60b\U0001f60c\U0001f60e-\U0001f617\U0001f619-\U0001f62c\U0001f62e-'
        '\U0001f641\U0001f643-\U0001f64e\U0001f650-\U0001f6bf\U0001f6c4\U0001f6c8\U0001f6f0\U0001f718'
        '\U0001f734\U0001f78b\U0001f78d\U0001f7c1\U0001f7e5\U0001f7f3\U0001f800\U0001f870\U0001f885'
        '\U0001f88b\U0001f8b0\U0001f8fc\U0001f8ff-\U0001f922\U0001f924-\U0001f97f\U0001f982\U0001f9ac'
        '\U0001f9d0\U0001fabd\U0001fad8]+',
        '[\u200b-\u200d\ufe0f]+',
        '[\u0900-\u09ff\u0a80-\u0aff\u0c00-\u0c7f\u0d00-\u0d7f\u0e00-\u0e7f\u10d0-\u10ff\u1ea0-\u1eff]+',
        '[\u0a00-\u0a7f\u0b80-\u0bff\u0c80-\u0cff\u0d80-\u0dff\u1000-\u109f\u1780-\u17ff]+',
        '[\u0b00-\u0b7f]+', '[\u0e80-\u0fff\u1200-\u137f\uff01-\uff9f]+'];
    v_weight constant integer[] := array[
        83, 228, 67, 80, 72, 227, 168, 140, 100, 199, 69, 56, 78, 114, 208];
    v_rest text := chars;
    v_before integer := length(chars);
    v_after integer;
    v_total bigint := 0;
begin
    for i in 1..cardinality(v_class) loop
        exit when v_before = 0;
        v_rest := regexp_replace(v_rest collate "C", v_class[i], '', 'g');
        v_after := length(v_rest);
        v_total := v_total + v_weight[i]::bigint * (v_before - v_after);
        v_before := v_after;
    end loop;
    -- What is in no class: a token is at least one byte.
    return v_total + 100 * octet_length(v_rest)::bigint;
end
$$;

comment on function pycontext._estimate_wide(text) is
    'Hundredths of tokens that the characters of three and four bytes take; what belongs to no script here counts by bytes.';

revoke execute on function pycontext._estimate_wide(text) from public;

-- Tokens of a text, high by about 10 to 25 percent in prose, code and data, so that it is hardly ever low.
-- Null and '' take none. Low, by up to a quarter, in a few languages of Latin letters (Irish, Welsh, Uzbek, Basque), and by up to
-- half for letters that make no words in scripts other than Latin, Cyrillic and Han.
create or replace function pycontext.estimate_tokens(text text)
returns integer
language plpgsql immutable parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_bytes integer := octet_length(text);
    v_ascii boolean := v_bytes = length(text);
    v_text text;   -- a group of up to three digits, one token, is one mark \x1e; a blank is \x1f
    v_lower text;
    v_bits bit varying;
    v_small bit varying;
    v_letter bit varying;   -- from here on one bit a byte (0x20): is it a letter, a sign
    v_pair bit varying;
    v_sign bit varying;
    v_letters integer;
    v_pairs integer;
    v_signs integer;
    v_sign_pairs integer;
    v_numbers integer;
    v_total bigint := 0;
    v_half integer;
    v_chars text;
    v_other record;
begin
    if text is null or text = '' then
        return 0;
    end if;
    if v_bytes > 1000000 then
        -- In halves: bit strings and regular expressions take several times the memory of the text.
        v_half := length(text) / 2;
        return least(pycontext.estimate_tokens(left(text, v_half))::bigint
            + pycontext.estimate_tokens(substr(text, v_half + 1)), 2147483647);
    end if;

    if not v_ascii then
        v_chars := regexp_replace(replace(text, ' ', '') collate "C", '[\x01-\x7f]+', '', 'g');
        if octet_length(v_chars) < 3 * length(v_chars) then
            select * into v_other from pycontext._estimate_alphabets(text, v_chars);
            v_total := v_other.hundredths;
            v_chars := v_other.chars;
        end if;
        if v_chars <> '' then
            v_total := v_total + pycontext._estimate_wide(v_chars);
        end if;
    end if;

    v_text := replace(text, E'\x1f', E'\x1e');
    if v_bytes > 2 * length(text) then
        -- Han and the like: few runs, three bytes a character. Elsewhere it is cheaper to look past them.
        v_ascii := true;
        v_text := regexp_replace(v_text collate "C", '[^\x01-\x7f]+', E'\x1f', 'g');
    end if;
    v_text := replace(regexp_replace(v_text collate "C", '[0-9]{1,3}', E'\x1e', 'g'), ' ', E'\x1f');
    v_bytes := octet_length(v_text);
    v_lower := lower(v_text collate "C");
    v_bits := pycontext._bytes_as_bits(v_text);
    v_small := pycontext._bytes_as_bits(v_lower);
    -- Letters are the bytes that small and capital forms differ in.
    v_letter := v_small # pycontext._bytes_as_bits(upper(v_text collate "C"));
    v_sign := (v_bits | (v_bits >> 1))
        & ~(case when v_ascii then v_letter else v_letter | (v_bits >> 2) end)
        & substring(('x' || repeat('2020202020202020', v_bytes / 8 + 1))::bit varying, 1, 8 * v_bytes);
    v_pair := v_letter & (v_letter << 8);
    v_letters := bit_count(v_letter);
    v_pairs := bit_count(v_pair);
    v_signs := bit_count(v_sign);
    v_sign_pairs := bit_count(v_sign & (v_sign << 8));
    v_numbers := v_bytes - octet_length(replace(v_text, E'\x1e', ''));

    v_total := v_total
        + 80 * (v_letters - v_pairs)::bigint   -- words
        + 13 * bit_count(v_pair & (v_pair << 16))   -- letters after a word's third
        + 30 * bit_count(v_small # v_bits)   -- capitals
        + 30 * v_signs + 44 * v_sign_pairs
        + 68 * (v_signs - v_sign_pairs - bit_count(v_letter & (v_sign << 8)))
        + 115 * v_numbers
        + 61 * (v_bytes - octet_length(replace(v_text, E'\x1f\x1e', '')))
        + 129 * (v_bytes - octet_length(replace(v_text, E'\n', '')))
        + 50 * (v_bytes - octet_length(replace(v_text, E'\r', '')))
        + 2 * (v_bytes - octet_length(replace(v_text, repeat(E'\x1f', 8), '')))   -- long runs of blanks, tabs
        + 7 * (v_bytes - octet_length(replace(v_text, repeat(E'\t', 8), '')))
        + 113 * regexp_count(v_lower collate "C", '[jqxzk]')
        + 165 * regexp_count(v_lower collate "C", '[bcdfghjklmnpqrstvwxz]{4}|[\x01-\x08\x0b\x0c\x0e-\x1d\x7f]')
        + 205 * regexp_count(v_lower collate "C", '[iu]\x1f|aa|ii|uu|dd|yn|wy');

    -- A word or a number is at least one token, a token at least one byte.
    return least((greatest(v_total, 100 * (v_letters - v_pairs + v_numbers)::bigint) + 199) / 100, octet_length(text));
end
$$;

comment on function pycontext.estimate_tokens(text) is
    'Tokens (o200k_base) of a text, estimated on the safe side in every script; for rows that no tokenizer has counted yet. Null and empty take none.';

revoke execute on function pycontext.estimate_tokens(text) from public;
